"""From a failing case to something that a person can read: minimised, compared, drawn, and run again by one command."""
