"""Weights on their way from a file somebody published to the packed form the kernels read.

`checkpoint` opens GGUF files and safetensors directories behind one interface, `packer` writes the packed model,
`prepare_model` does all of it once and finds it again in the cache. The worker imports none of this: it maps what
`enginehouse.runtime.packed` opens.
"""

from enginehouse.runtime.weights.prepare import PreparedModel, prepare_model

__all__ = ["PreparedModel", "prepare_model"]
