def get_ip() -> str:
    """This node's address, which vLLM looks up."""
    return "127.0.0.1"
