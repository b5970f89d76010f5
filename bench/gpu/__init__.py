"""A backend on a GPU: is it right there, how fast, what does it cost the host, does it stand a load. See bench/gpu/__main__.py."""
