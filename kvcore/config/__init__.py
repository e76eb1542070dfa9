"""Configuration of everything that runs by itself: flag over environment variable over TOML file over default."""
