"""Step 2: an empty component beside each mixin; the bodies read its fields alone, and stay where they are."""
