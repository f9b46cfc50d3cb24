package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Connection clocks: a dead connection is noticed within 2*pingInterval even
// when no traffic shows it, and a lost server is asked for again four times a
// second.
const (
	pingInterval  = 5 * time.Second
	pingsOut      = 2
	reconnectWait = 250 * time.Millisecond
	LogPause      = 10 * time.Second
	flushTimeout  = 2 * time.Second
	firstTimeout  = 5 * time.Second
)

// A Config says how to reach NATS.
type Config struct {
	// URLs are the servers, such as nats://host:4222. Ignored with InProcess.
	URLs []string
	// Name is what `nats server report connections` shows.
	Name string
	// Creds is the path of a credentials file (user JWT and nkey seed); empty
	// for none.
	Creds string
	// CA, Cert and Key are PEM files for TLS and mutual TLS; each is read again
	// at every reconnect, so that renewed certificates need no restart.
	CA, Cert, Key string
	// InProcess connects without a socket; see package embedded.
	InProcess nats.InProcessConnProvider
	// InboxPrefix is the prefix of reply inboxes; empty means NATS's default.
	InboxPrefix string
	// AllowInsecure permits a connection beyond loopback without TLS or without
	// credentials.
	AllowInsecure bool
	// FailFast makes Connect fail when no server answers within 5 s. Without it
	// Connect returns at once and the connection is made as soon as it can be.
	FailFast bool
	// Logger receives what happens to the connection; nil means the default.
	Logger *slog.Logger
}

// A Conn is a connection to NATS that is never given up: it reconnects for
// ever and buffers nothing while it is down, so that nothing old is sent later.
// It is safe for concurrent use.
type Conn struct {
	nc        *nats.Conn
	log       *slog.Logger
	inProcess nats.InProcessConnProvider

	mu      sync.Mutex
	onUp    []func()
	lastLog time.Time
}

// Connect opens a connection. The error names the file or server at fault.
func Connect(ctx context.Context, cfg Config) (*Conn, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	c := &Conn{log: cfg.Logger, inProcess: cfg.InProcess}
	opts, err := cfg.options(c)
	if err != nil {
		return nil, err
	}
	servers, where := strings.Join(cfg.URLs, ","), allShown(cfg.URLs)
	if cfg.InProcess != nil {
		// A URL would make the client speak TLS over the pipe and hang.
		servers, where = "", "the server in this process"
		opts = append(opts, nats.InProcessServer(cfg.InProcess))
	}
	c.nc, err = nats.Connect(servers, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w%s", where, err, remedy(err))
	}
	if cfg.FailFast {
		fctx, cancel := context.WithTimeout(ctx, firstTimeout)
		defer cancel()
		if err := c.nc.FlushWithContext(fctx); err != nil {
			c.nc.Close()

			return nil, fmt.Errorf("connect to NATS at %s: no answer: %w", where, err)
		}
	}

	return c, nil
}

func remedy(err error) string {
	switch {
	case errors.Is(err, nats.ErrNoServers), strings.Contains(err.Error(), "connection refused"):
		return " (is the server running, and is the URL right?)"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return " (the server refused the credentials: check --nats-creds and the client certificate)"
	default:
		return ""
	}
}

func (cfg Config) options(c *Conn) ([]nats.Option, error) {
	opts := []nats.Option{
		nats.Name(cfg.Name),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(reconnectWait),
		nats.ReconnectJitter(reconnectWait, reconnectWait),
		nats.ReconnectBufSize(-1),
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(pingsOut),
		nats.RetryOnFailedConnect(!cfg.FailFast),
		nats.IgnoreAuthErrorAbort(),
		// The handlers may run before Connect has stored the connection.
		nats.ConnectHandler(func(nc *nats.Conn) { c.up(nc, "connected to NATS") }),
		nats.ReconnectHandler(func(nc *nats.Conn) { c.up(nc, "reconnected to NATS") }),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) { c.down(nc, err) }),
		nats.ReconnectErrHandler(func(nc *nats.Conn, err error) { c.down(nc, err) }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) { c.asyncError(sub, err) }),
	}
	if cfg.InboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(cfg.InboxPrefix))
	}
	if cfg.Creds != "" {
		if _, err := os.Stat(cfg.Creds); err != nil {
			return nil, fmt.Errorf("NATS credentials file: %w", err)
		}
		opts = append(opts, nats.UserCredentials(cfg.Creds))
	}
	if (cfg.Cert == "") != (cfg.Key == "") {
		return nil, errors.New("NATS client certificate: give both the certificate and the key file")
	}
	// The client reads these files now and at each reconnect.
	if cfg.Cert != "" {
		opts = append(opts, nats.ClientCert(cfg.Cert, cfg.Key))
	}
	if cfg.CA != "" {
		opts = append(opts, nats.RootCAs(cfg.CA))
	}

	return opts, cfg.checkURLs()
}

// checkURLs refuses invalid URLs and, unless AllowInsecure is set, connections beyond this
// host without TLS or without credentials.
func (cfg Config) checkURLs() error {
	if cfg.InProcess != nil {
		return nil
	}
	urls, err := serverURLs(cfg.URLs)
	if err != nil {
		return err
	}
	for _, raw := range urls {
		u, err := parseURL(raw)
		if err != nil {
			return err
		}
		if cfg.AllowInsecure || isLoopback(u.Hostname()) {
			continue
		}
		if u.Scheme != "tls" && u.Scheme != "wss" && cfg.CA == "" && cfg.Cert == "" {
			return fmt.Errorf("NATS URL %s is beyond loopback and without TLS: "+
				"give a CA file or a tls:// URL, or allow it explicitly with --nats-allow-insecure", shown(raw))
		}
		if cfg.Creds == "" && cfg.Cert == "" && u.User == nil {
			return fmt.Errorf("NATS URL %s is beyond loopback and without credentials: "+
				"give a credentials file or a client certificate, or allow it explicitly with --nats-allow-insecure", shown(raw))
		}
	}

	return nil
}

func isLoopback(host string) bool {
	return host == "localhost" || net.ParseIP(host).IsLoopback() // of nil, too
}

// OnUp calls f at once if the connection stands, and each time it is made from
// then on, from the client's own goroutine: f must not block. It may be called
// once too often, never too seldom.
func (c *Conn) OnUp(f func()) {
	c.mu.Lock()
	c.onUp = append(c.onUp, f)
	c.mu.Unlock()
	if c.Up() {
		f()
	}
}

// Up reports whether the client is connected.
func (c *Conn) Up() bool { return c.nc.IsConnected() }

// ServerID returns the id of the server process that the connection leads to, which is
// another one after each of its starts; empty while there is none.
func (c *Conn) ServerID() string { return c.nc.ConnectedServerId() }

// Client returns the NATS client underneath, for who checks the contract and so has
// to say what this package does not.
func (c *Conn) Client() *nats.Conn { return c.nc }

// URL returns the server the connection stands to, for people; "in process" for
// one without a socket.
func (c *Conn) URL() string { return c.where(c.nc) }

// where is URL for handlers that run before the connection is stored.
func (c *Conn) where(nc *nats.Conn) string {
	if c.inProcess != nil {
		return "in process" // the client would name NATS's default URL
	}

	return shown(nc.ConnectedUrl())
}

// Encrypted reports whether NATS requires TLS of all clients outside of its own process,
// by the server's own info. Then messages are encrypted on every client's connection.
func (c *Conn) Encrypted() bool {
	if c.inProcess != nil {
		server, ok := c.inProcess.(interface{ RequiresTLS() bool })

		return ok && server.RequiresTLS()
	}
	_, err := c.nc.TLSConnectionState()

	return err == nil && c.nc.TLSRequired()
}

// Flush waits until the server has taken everything sent so far, subscriptions
// included.
func (c *Conn) Flush(ctx context.Context) error {
	if err := c.nc.FlushWithContext(ctx); err != nil {
		return fmt.Errorf("no answer from NATS: %w", err)
	}

	return nil
}

// Close flushes for at most two seconds and closes. It does not wait for handlers; their
// owner does that first.
func (c *Conn) Close() {
	if c.nc.IsConnected() {
		_ = c.nc.FlushTimeout(flushTimeout) // closing anyway; peers ask for what they miss
	}
	c.nc.Close()
}

func (c *Conn) up(nc *nats.Conn, text string) {
	c.log.Info(text, "url", c.where(nc))
	c.mu.Lock()
	hooks := append([]func(){}, c.onUp...)
	c.lastLog = time.Time{}
	c.mu.Unlock()
	for _, f := range hooks {
		f()
	}
}

// down is called for the loss and for every failed try; one line in ten
// seconds is enough.
func (c *Conn) down(nc *nats.Conn, err error) {
	if nc.IsClosed() {
		return
	}
	c.mu.Lock()
	quiet := time.Since(c.lastLog) < LogPause
	if !quiet {
		c.lastLog = time.Now()
	}
	c.mu.Unlock()
	if quiet {
		return
	}
	text := "connection closed by the server"
	if err != nil {
		text = err.Error() + remedy(err)
	}
	c.log.Warn("not connected to NATS; retrying", "err", text)
}

func (c *Conn) asyncError(sub *nats.Subscription, err error) {
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	c.log.Error("NATS reports an error", "err", err, "subject", subject)
}

// ErrTooLarge is wrapped when a message will never fit; the rest of what
// publish returns passes when the connection comes back.
var ErrTooLarge = errors.New("too large for the bus")

// Publish sends an envelope. It fails at once while the connection is down and
// when the message is larger than the server takes.
func (c *Conn) Publish(m *nats.Msg) error {
	if limit := c.nc.MaxPayload(); limit > 0 && int64(m.Size()) > limit {
		return fmt.Errorf("%w: message of %d bytes on %s, where the server takes %d: raise max_payload",
			ErrTooLarge, m.Size(), m.Subject, limit)
	}
	if err := c.nc.PublishMsg(m); err != nil {
		return fmt.Errorf("publish on %s: %w", m.Subject, err)
	}

	return nil
}

// send publishes an envelope in protobuf.
func (c *Conn) send(subject, reply string, env *driverv1.Envelope) error {
	payload, err := Encode(env, "")
	if err != nil {
		return err
	}

	return c.Publish(&nats.Msg{Subject: subject, Reply: reply, Data: payload})
}

// Subscribe has messages passed to f, from one goroutine. Members of a queue group share
// them; an empty queue is no group.
func (c *Conn) Subscribe(subject, queue string, f nats.MsgHandler) (Subscription, error) {
	sub, err := c.nc.QueueSubscribe(subject, queue, f)
	if err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", subject, err)
	}

	return sub, nil
}

// watch subscribes for as long as stop is not called.
func (c *Conn) watch(subject string, f nats.MsgHandler) (stop func(), err error) {
	sub, err := c.Subscribe(subject, "", f)
	if err != nil {
		return nil, err
	}

	return func() { _ = sub.Unsubscribe() }, nil // fails only on a closed connection
}
