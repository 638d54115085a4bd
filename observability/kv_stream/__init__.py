"""Following KV-event streams: discovery, cursor, subscriber and the view of who holds which block."""
