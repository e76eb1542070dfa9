"""Pictures of one run, all drawn from its recorded steps: Mermaid, terminal, Perfetto, and one line of state each."""
