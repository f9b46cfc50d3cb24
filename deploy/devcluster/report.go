package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
)

// componentError is an error of a component, with the path of its log.
type componentError struct {
	component string
	log       string
	err       error
}

func (e *componentError) Error() string { return fmt.Sprintf("%s: %v", e.component, e.err) }

func (e *componentError) Unwrap() error { return e.err }

// report prints an error, with the last lines of the log of the component that failed.
func report(w io.Writer, err error) {
	fmt.Fprintf(w, "devcluster: %v\n", err)
	var failed *componentError
	if !errors.As(err, &failed) {
		return
	}
	const lines = 15
	content, readErr := lastLines(failed.log, lines)
	if readErr != nil {
		fmt.Fprintf(w, "its log could not be read: %v\n", readErr)
		return
	}
	if len(content) == 0 {
		fmt.Fprintf(w, "its log %s is empty\n", failed.log)
		return
	}
	fmt.Fprintf(w, "last lines of %s:\n%s\n", failed.log, bytes.TrimSuffix(content, []byte("\n")))
}

// lastLines returns at most n lines from the end of a file, of its last 64 KiB at most.
func lastLines(path string, n int) ([]byte, error) {
	const window = 64 << 10
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > window {
		if _, err := f.Seek(-window, io.SeekEnd); err != nil {
			return nil, err
		}
	}
	content, err := io.ReadAll(io.LimitReader(f, window))
	if err != nil {
		return nil, err
	}
	lines := bytes.SplitAfter(content, []byte("\n"))
	if len(lines[len(lines)-1]) == 0 {
		lines = lines[:len(lines)-1]
	}
	return bytes.Join(lines[max(0, len(lines)-n):], nil), nil
}
