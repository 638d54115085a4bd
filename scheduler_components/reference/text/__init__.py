"""Text: tokens of a prompt, text of an output. In the serving process, never in a rank's."""
