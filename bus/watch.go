package bus

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
)

// Watch passes on every message on subject, which may hold wildcards, as it
// came: for programs that show traffic, not for those that take part in it. The
// server knows of the subscription when Watch returns. f runs on one goroutine; a
// slow f loses messages, which the connection's logger reports. It must not keep
// header or payload.
func Watch(
	conn *Conn, subject string, f func(subject, reply string, header map[string][]string, payload []byte),
) (stop func(), err error) {
	stop, err = conn.watch(subject, func(m *nats.Msg) { f(m.Subject, m.Reply, m.Header, m.Data) })
	if err != nil {
		return nil, err
	}
	if err := conn.nc.FlushTimeout(flushTimeout); err != nil {
		stop()

		return nil, fmt.Errorf("subscribe to %s: no answer from %s: %w", subject, conn.URL(), err)
	}
	// The server refuses a subscription ahead of its answer to the flush.
	err = conn.nc.LastError()
	if errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), fmt.Sprintf("%q", subject)) {
		stop()

		return nil, fmt.Errorf("subscribe to %s: %w (use credentials that may subscribe there)", subject, err)
	}

	return stop, nil
}
