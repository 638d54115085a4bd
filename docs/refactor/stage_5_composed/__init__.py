"""Step 5: three of the components are the kit's; the queue counts its tokens itself. The last one stays ours."""
