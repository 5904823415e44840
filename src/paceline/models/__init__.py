"""The target model: finding it, loading it, and one forward pass over any mix of rows."""
