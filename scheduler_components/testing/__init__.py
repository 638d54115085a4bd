"""The test kit: fakes, strategies and checks that third-party parts can be held to."""
