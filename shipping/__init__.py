"""What a release is made of, built and judged: wheels and the source distribution, the Hugging Face layout, trial installs."""
