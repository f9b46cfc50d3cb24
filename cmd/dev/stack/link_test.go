package stack

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// TestLink sends through a link that is held, mended and cut.
func TestLink(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		d      Direction
	}{
		"to the server": {"what the client says is held back", ToServer},
		"to the client": {"the answer is held back", ToClient},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			echo, err := net.Listen("tcp", Loopback(0))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = echo.Close() })
			go func() {
				for c, err := echo.Accept(); err == nil; c, err = echo.Accept() {
					go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
				}
			}()
			l, err := OpenLink(t.Context(), echo.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(l.Close)
			conn, err := net.Dial("tcp", l.Address())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			in := bufio.NewReader(conn)
			say := func(line string) {
				t.Helper()
				if _, err := io.WriteString(conn, line); err != nil {
					t.Fatal(err)
				}
			}
			hear := func(want string, wait time.Duration) bool {
				t.Helper()
				if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
					t.Fatal(err)
				}
				got, err := in.ReadString('\n')
				if err == nil && got != want {
					t.Errorf("heard %q, want %q: %s", got, want, tc.reason)
				}
				return err == nil
			}
			say("one\n")
			if !hear("one\n", startLimit) {
				t.Fatal("nothing comes through")
			}
			l.Hold(tc.d)
			if l.Hits() != 0 {
				t.Error("it has hit something although nothing was said")
			}
			say("two\n")
			const moment = 50 * time.Millisecond
			if hear("", moment) {
				t.Error("it came although it is held: " + tc.reason)
			}
			within, cancel := context.WithTimeout(t.Context(), startLimit)
			defer cancel()
			if err := Poll(within, "what was said was hit", func(context.Context) error {
				if l.Hits() != 1 {
					return fmt.Errorf("it has hit %d times: %s", l.Hits(), tc.reason)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			l.Mend()
			if !hear("two\n", startLimit) {
				t.Error("what was held is lost")
			}
			l.Cut()
			if hear("", startLimit) {
				t.Error("it came through a cut")
			}
			if l.Hits() == 0 {
				t.Error("a cut of what was in use counts for nothing")
			}
		})
	}
}

// TestLinkMissed breaks an unused link.
func TestLinkMissed(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		do     func(*Link)
	}{
		"cut":   {"there is nothing to close", (*Link).Cut},
		"hold":  {"there is nothing to hold back", func(l *Link) { l.Hold(ToServer) }},
		"delay": {"there is nothing to delay", func(l *Link) { l.Delay(time.Second) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := OpenLink(t.Context(), Loopback(1))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(l.Close)
			tc.do(l)
			if l.Live() || l.Hits() != 0 {
				t.Errorf("live: %v, hits: %d: %s", l.Live(), l.Hits(), tc.reason)
			}
		})
	}
}
