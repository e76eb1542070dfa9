"""`kvcore bench`: measurements of what is installed here, as ratios against a yardstick of the same run."""
