"""Native sparse attention: compressed, selected and sliding branches."""
