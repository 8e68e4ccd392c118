"""L3 storage: the verbs (`verbs`), the stores behind them, and the registry that finds them by name."""
