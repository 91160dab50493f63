"""Commands about what is installed: packages and backends, recipes, shell completion."""
