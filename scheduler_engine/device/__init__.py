"""What the reference engine runs on and serves: a simulated device or a real model, generated and recorded requests;
and many simulated ranks of a hierarchical cache.
"""
