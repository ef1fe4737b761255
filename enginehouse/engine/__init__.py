"""The life of a sequence: queueing, batching, KV cache, worker process, streaming."""
