"""From a public function to a core and back: arguments, checks, replay, results, gradients."""
