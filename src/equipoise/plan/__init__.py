"""Before the first step: what the machine does, what each layer costs, which plan follows."""
