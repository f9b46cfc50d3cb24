package chaos_test

import (
	"bufio"
	"io"
	"net"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/chaos"
)

// TestLink sends through a link that is held, mended and cut.
func TestLink(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		d      chaos.Direction
	}{
		"to the server": {"what the client says is held back", chaos.ToServer},
		"to the client": {"the answer is held back", chaos.ToClient},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			echo, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = echo.Close() })
			go func() {
				for c, err := echo.Accept(); err == nil; c, err = echo.Accept() {
					go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
				}
			}()
			l, err := chaos.OpenLink(t.Context(), echo.Addr().String())
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
			if !hear("one\n", time.Minute) {
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
			bustest.Eventually(t, "what was said is hit: "+tc.reason, func() bool { return l.Hits() == 1 })
			l.Mend()
			if !hear("two\n", time.Minute) {
				t.Error("what was held is lost")
			}
			l.Cut()
			if hear("", time.Minute) {
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
		do     func(*chaos.Link)
	}{
		"cut":   {"there is nothing to close", (*chaos.Link).Cut},
		"hold":  {"there is nothing to hold back", func(l *chaos.Link) { l.Hold(chaos.ToServer) }},
		"delay": {"there is nothing to delay", func(l *chaos.Link) { l.Delay(time.Second) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := chaos.OpenLink(t.Context(), "127.0.0.1:1")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(l.Close)
			tc.do(l)
			if l.Clients() > 0 || l.Hits() != 0 {
				t.Errorf("live: %v, hits: %d: %s", l.Clients() > 0, l.Hits(), tc.reason)
			}
		})
	}
}
