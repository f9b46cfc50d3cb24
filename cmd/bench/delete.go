package main

import "context"

func benchDelete(context.Context, *bench) error { return nil }
