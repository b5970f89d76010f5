"""The parts of a release, built and judged: wheels and the source distribution, the Hugging Face layout, trial installs."""
