"""OpenAI's Responses protocol: `POST /v1/responses`, and `GET` and `DELETE` of what was stored.

| module | job |
|---|---|
| `request` | the body: its fields, and what of them is not supported |
| `items` | input and output items as messages for the chat template |
| `building` | the response object and the events that build it |
| `store` | finished responses, bounded by number, bytes and time |
| `protocol` | bodies to calls, deltas to answers |
| `routes` | reading and deleting stored responses |
"""
