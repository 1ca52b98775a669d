"""Part of FlexKV's import names."""
