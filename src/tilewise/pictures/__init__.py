"""Pictures of masks and scores: the tiles that a kernel visits, full or partial, and the bytes moved.

- :mod:`tilewise.pictures.reading`: a mask or a score from text, without running any of it as code.
- :mod:`tilewise.pictures.view`: what a picture shows, taken from :mod:`tilewise.planning.tiles`.
- :mod:`tilewise.pictures.terminal`, :mod:`tilewise.pictures.figure`: it, drawn.
- :mod:`tilewise.pictures.explained`: ``explain(...).plot()``.
"""
