"""What requests wait for besides pages: grammars, adapters, sessions and deadlines, agreed between ranks."""
