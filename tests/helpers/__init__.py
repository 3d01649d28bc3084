"""Hold what tests share: small configurations, environments made to be learned or to fail, and slow references."""
