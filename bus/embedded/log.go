package embedded

import (
	"fmt"
	"log/slog"
)

// slogger passes the server's log on. Its debug and trace output is never
// switched on, because it prints payloads.
type slogger struct {
	log    *slog.Logger
	broken chan<- string // has room for one text
}

func (l slogger) Noticef(format string, v ...any) {
	l.log.Debug("nats-server: " + fmt.Sprintf(format, v...))
}

func (l slogger) Warnf(format string, v ...any) {
	l.log.Warn("nats-server: " + fmt.Sprintf(format, v...))
}

func (l slogger) Errorf(format string, v ...any) {
	l.log.Error("nats-server: " + fmt.Sprintf(format, v...))
}

// Fatalf does not end the process: the server then is not ready, and Start says so.
func (l slogger) Fatalf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	l.log.Error("nats-server cannot run: " + text)
	select {
	case l.broken <- text:
	default:
	}
}

func (l slogger) Debugf(string, ...any) {}
func (l slogger) Tracef(string, ...any) {}
