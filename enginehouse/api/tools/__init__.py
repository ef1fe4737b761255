"""Tool calling: from `tools` in a request to calls in an answer, for every protocol.

| module | job |
|---|---|
| `definitions` | what a client offered and asked for, checked: `Function`, `ToolRequest` |
| `schemas` | parameter schemas: refused when malformed, closed where they are forced |
| `formats` | how a model writes calls: `ToolFormat`, chosen by its chat template |
| `parsing` | text to content and calls, piece by piece: `ToolCallParser`, `ForcedCallParser` |
| `forcing` | the grammar that leaves a model nothing but calls |
| `history` | earlier calls and results as the model's template can take them |
| `calling` | one request's way through all of these: `ToolCalling` |
| `logprobs` | log-probabilities of the text that is content |

Everything but `calling` is pure. A protocol makes a `ToolRequest` of its own fields, and turns the events of a
parser into its own shape.
"""
