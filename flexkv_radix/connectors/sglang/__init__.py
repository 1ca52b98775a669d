"""SGLang: `--radix-cache-backend radixshmem`, or its own `--enable-flexkv`.

backend        what the plug-in registers
cache          the radix cache backed by the node's; hooks: the two shapes of SGLang's interface
layerwise      loads that the forward waits for layer by layer
ranks          agreement of an engine's ranks
flexkv_config  the engine's configuration for FlexKV; also what `--enable-flexkv` asks for
"""
