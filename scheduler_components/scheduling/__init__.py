"""What decides which requests run: policies, admission, preemption, queues and the KV cache of a request."""
