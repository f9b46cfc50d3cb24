package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// start runs the program in this process until stop, which returns its error.
func start(t *testing.T, args ...string) (url string, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := command()
	read, write := io.Pipe()
	cmd.SetArgs(args)
	cmd.SetOut(write)
	cmd.SetErr(io.Discard)
	done := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(ctx)
		write.CloseWithError(io.EOF)
		done <- err
	}()
	stop = func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(20 * time.Second):
			t.Fatal("the program does not end")

			return nil
		}
	}
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil {
		t.Fatalf("the program ended at once: %v", stop())
	}
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening ")
	if !ok {
		t.Fatalf("first line %q, want listening and a URL", line)
	}

	return url, stop
}

func TestRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	tokenFile, logFile := filepath.Join(dir, "token"), filepath.Join(dir, "log.jsonl")
	if err := os.WriteFile(tokenFile, []byte("from-a-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	url, stop := start(t, "--api-token-file", tokenFile, "--log", logFile, "--identity", "token",
		"--hold", "held", "--boot-delay", "1h", "--fault", `{"operation": "delete", "status": 418}`)
	client, err := cloudapi.NewClient(url, "from-a-file")
	if err != nil {
		t.Fatal(err)
	}
	i, err := client.Create(t.Context(), cloudapi.CreateRequest{
		Name: "m", MachineType: "small", Region: "here", IdempotencyToken: "t",
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Delete(t.Context(), i.ID); err == nil || !strings.Contains(err.Error(), "418") {
		t.Errorf("delete: %v, want the fault", err)
	}
	held := make(chan error, 1)
	go func() {
		_, err := client.Create(t.Context(), cloudapi.CreateRequest{
			Name: "held", MachineType: "small", Region: "here", IdempotencyToken: "u",
		})
		held <- err
	}()
	waitFor(t, logFile, `"event":"held"`)

	if err := stop(); err != nil {
		t.Errorf("stop with a call in flight: %v", err)
	}
	if err := <-held; cloudapi.CodeOf(err) != cloudapi.CodeUnavailable {
		t.Errorf("the call in flight: %v, want %s", err, cloudapi.CodeUnavailable)
	}
	if _, err := client.List(t.Context(), cloudapi.Filter{}); err == nil {
		t.Error("the program has ended and still answers")
	}
}

// waitFor polls a file until it contains text.
func waitFor(t *testing.T, file, text string) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		data, err := os.ReadFile(file)
		if err == nil && bytes.Contains(data, []byte(text)) {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-deadline:
			t.Fatalf("%s does not contain %s: %v", file, text, err)
		}
	}
}

// A caller that has connected and asked nothing yet is none that is cut off.
func TestStopsWithASilentCaller(t *testing.T) {
	t.Parallel()
	url, stop := start(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err, stop())
	}
	defer conn.Close()
	// Connections are accepted in their order: with an answer on a later one, the silent one is known.
	client, err := cloudapi.NewClient(url, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.List(t.Context(), cloudapi.Filter{}); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil {
		t.Errorf("the program ended with %v", err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	missing := filepath.Join(t.TempDir(), "missing")
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		args  []string
		wants []string
	}{
		"taken port":       {[]string{"--listen", taken.Addr().String()}, []string{"the port is in use", "port 0"}},
		"no address":       {[]string{"--listen", "nonsense"}, []string{"--listen nonsense", "127.0.0.1:0"}},
		"open to all":      {[]string{"--listen", "0.0.0.0:0"}, []string{"--api-token-file"}},
		"unknown flag":     {[]string{"--lissten", "x"}, []string{"--lissten", `"virtual-cloud --help"`}},
		"argument":         {[]string{"now"}, []string{`"now"`, "--help"}},
		"identity":         {[]string{"--identity", "x"}, []string{`"x"`, "unique_name"}},
		"effect":           {[]string{"--create-effect", "x"}, []string{`"x"`, "start or end"}},
		"fault":            {[]string{"--fault", "x"}, []string{"--fault x", "operation"}},
		"unknown fault":    {[]string{"--fault", `{"op": "create"}`}, []string{`"op"`, "operation"}},
		"log":              {[]string{"--log", missing + "/log"}, []string{"--log", missing}},
		"kubeconfig":       {[]string{"--join-kubeconfig", missing}, []string{"--join-kubeconfig", missing}},
		"two tokens":       {[]string{"--api-token", "x", "--api-token-file", empty}, []string{"give one"}},
		"empty token file": {[]string{"--api-token-file", empty}, []string{empty}},
		"no token file":    {[]string{"--api-token-file", missing}, []string{missing}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := command()
			cmd.SetArgs(tc.args)
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			err := cmd.ExecuteContext(ctx)
			if err == nil {
				t.Fatal("no error")
			}
			for _, text := range tc.wants {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%q does not contain %q", err, text)
				}
			}
		})
	}
}
