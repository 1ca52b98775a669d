"""FlexKV's import names, answered by flexkv_radix."""
