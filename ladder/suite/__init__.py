"""The ladder as tests, for anybody's project: `pytest --pyargs kvcore.ladder.suite -m ladder`."""
