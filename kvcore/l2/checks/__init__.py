"""What every L2 adapter promises, as plain functions that run against any of them: a developer's or an operator's."""
