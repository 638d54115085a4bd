"""A double of the parts of vLLM that the plugin touches, for tests where vLLM is not installed.

Names, fields, defaults and order are those of vLLM 0.32, and ``lookahead_token_ids`` of 0.33. Where vLLM is installed,
the same tests run over vLLM itself.
"""
