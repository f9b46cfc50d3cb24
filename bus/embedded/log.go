package embedded

import (
	"fmt"
	"log/slog"
)

// slogger passes the server's log on. Its debug and trace output is never
// switched on, because it prints payloads.
type slogger struct{ log *slog.Logger }

func (l slogger) Noticef(format string, v ...any) {
	l.log.Debug("nats-server: " + fmt.Sprintf(format, v...))
}

func (l slogger) Warnf(format string, v ...any) {
	l.log.Warn("nats-server: " + fmt.Sprintf(format, v...))
}

func (l slogger) Errorf(format string, v ...any) {
	l.log.Error("nats-server: " + fmt.Sprintf(format, v...))
}

// Fatalf only logs: the server then is not ready, and Start says so.
func (l slogger) Fatalf(format string, v ...any) {
	l.log.Error("nats-server cannot run: " + fmt.Sprintf(format, v...))
}
func (l slogger) Debugf(string, ...any) {}
func (l slogger) Tracef(string, ...any) {}
