"""A backend on a GPU: is it right there, how fast, what does it cost the host, does it stand a load. See tests/judge/__main__.py."""
