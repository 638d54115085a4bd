"""Step 3: the bodies are cut from the mixins and pasted into the components. Nothing else changes."""
