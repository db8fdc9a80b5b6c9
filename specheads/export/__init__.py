"""Export heads: layouts for serving engines, upload to the Hub, plug-ins for vLLM and transformers.

The attribute `specheads.export` is the library function, so import from this package by
`from specheads.export import ...`.
"""
