"""What looks at schedulers: metrics, the stream's subscriber and its view, HTTP answers, watch and doctor."""
