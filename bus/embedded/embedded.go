// Package embedded runs a nats-server inside the process. It is for cmd/mcm
// and for tests; nothing a driver links imports it, so that no driver carries a
// server.
package embedded

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/conf"
	"github.com/nats-io/nats-server/v2/server"
)

const (
	// A class with a Secret of Kubernetes' limit of 1 MiB must fit a reply.
	maxPayload = 4 << 20
	// A backlog older than this many bytes means a client that no longer reads.
	maxPending = 64 << 20
)

// Options say how the server runs.
type Options struct {
	// Listen is the host and port for clients; port 0 picks a free one.
	Listen string
	// StoreDir is JetStream's directory. Empty means that streams are kept in memory
	// only, unless ConfigFile says something of JetStream itself.
	StoreDir string
	// ConfigFile is the path of a nats-server configuration whose settings win
	// over these; empty for none.
	ConfigFile string
	// MonitorPort serves NATS's monitoring endpoints on 127.0.0.1; 0 for none.
	MonitorPort int
	// AllowInsecure permits listening beyond loopback without TLS or without
	// authentication.
	AllowInsecure bool
	// Logger receives the server's log; nil means the default.
	Logger *slog.Logger
	// Quit ends the wait for a server that is not ready yet when it is closed, as a
	// context's Done is; nil is never.
	Quit <-chan struct{}
}

// A Server is one embedded nats-server. Its methods are safe for concurrent
// use.
type Server struct {
	opts Options

	mending   sync.Mutex // one restart or stop at a time; locked before the others
	reloading sync.Mutex // one at a time; locked before mu

	mu           sync.Mutex
	srv          *server.Server
	url          string
	store        store
	mended       time.Time     // when it was last restarted for its store
	certificates []*tls.Config // of the listeners, as they are shown
	tls          bool          // required of clients
	stopped      func()        // ends what looks for renewed certificates
}

// Start runs a server with JetStream and returns when it takes clients and its store
// is open: that may take two minutes. The error names the port or directory at fault.
func Start(opts Options) (*Server, error) {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	s := &Server{opts: opts}
	if err := s.start(opts.Listen); err != nil {
		return nil, err
	}

	return s, nil
}

func (s *Server) start(listen string) (err error) {
	dir, err := s.openStore()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, dir.close())
		}
	}()
	o, err := s.serverOptions(listen, dir)
	if err != nil {
		return err
	}
	// The server reports a taken port by a fatal log line and then is merely not
	// ready; asking the kernel first gives an error that names the port.
	if err := checkListen(o); err != nil {
		return err
	}
	certificates := certificatesOf(o)
	srv, err := server.NewServer(o)
	if err != nil {
		return fmt.Errorf("configure the embedded nats-server: %w", err)
	}
	broken := make(chan string, 1)
	srv.SetLoggerV2(slogger{s.opts.Logger, broken}, false, false, false)
	go srv.Start()
	wait := &readying{
		ready: func() error { return readyError(srv) }, limit: readyTimeout, broken: broken, quit: s.opts.Quit, log: s.opts.Logger,
	}
	if o.JetStream {
		wait.limit = recoverTimeout
	}
	if err := wait.wait(); err != nil {
		srv.Shutdown()
		srv.WaitForShutdown()

		return err
	}
	if config := srv.JetStreamConfig(); config != nil { // none once the server has switched JetStream off
		dir.dir = config.StoreDir
	}
	s.mu.Lock()
	s.srv, s.url, s.certificates, s.tls, s.store = srv, srv.ClientURL(), certificates, requiresTLS(o), dir
	s.stopped = s.lookAfterCertificates()
	s.mu.Unlock()

	return nil
}

// serverOptions goes through the configuration parser, which wires defaults
// that filling the struct leaves out.
func (s *Server) serverOptions(listen string, dir store) (*server.Options, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("NATS listen address %q: want host:port: %w", listen, err)
	}
	if port == "0" {
		port = strconv.Itoa(server.RANDOM_PORT)
	}
	theirs, err := s.configured()
	if err != nil {
		return nil, err
	}
	var cfg strings.Builder
	// A setting with two spellings is read in no particular order, so that ours
	// must be absent where the file has one of them.
	ours := func(line string, unless ...string) {
		for _, key := range unless {
			if theirs[key] {
				return
			}
		}
		cfg.WriteString(line + "\n")
	}
	ours(fmt.Sprintf("host: %q", host), "host", "net", "listen")
	ours("port: "+port, "port", "listen")
	ours(fmt.Sprintf("max_payload: %d", maxPayload), "max_payload")
	ours(fmt.Sprintf("max_pending: %d", maxPending), "max_pending")
	ours(`ping_interval: "5s"`, "ping_interval")
	ours("ping_max: 2", "ping_max")
	ours(`write_deadline: "5s"`, "write_deadline")
	ours(dir.settings, "jetstream")
	if s.opts.MonitorPort != 0 {
		ours(fmt.Sprintf("http: \"127.0.0.1:%d\"", s.opts.MonitorPort), "http", "http_port", "monitor_port")
	}
	if s.opts.ConfigFile != "" {
		// Included rather than copied, so that what the file includes itself is
		// looked for beside it. Here, an include is relative to the working
		// directory, even if it starts with a slash.
		path, err := relative(s.opts.ConfigFile)
		if err != nil {
			return nil, fmt.Errorf("NATS configuration file: %w", err)
		}
		fmt.Fprintf(&cfg, "include %q\n", path)
	}
	o := &server.Options{}
	if err := o.ProcessConfigString(cfg.String()); err != nil {
		discard(o)

		return nil, fmt.Errorf("NATS configuration (%s): %w", cmp.Or(s.opts.ConfigFile, "built in"), err)
	}
	o.NoSigs = true // signals are the program's
	if !theirs["jetstream.sync_interval"] && !theirs["jetstream.sync"] {
		o.SyncAlways = true // what the server has acknowledged outlives a power cut
	}
	if err := s.checkInsecure(o); err != nil {
		discard(o)

		return nil, err
	}

	return o, nil
}

func relative(path string) (string, error) {
	here, err := os.Getwd()
	if err != nil {
		return "", err
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return "", err
	}

	return filepath.Rel(here, path)
}

// configured returns the top-level settings of the configuration file, in lower
// case as the server takes them, and those of JetStream as jetstream.name.
func (s *Server) configured() (map[string]bool, error) {
	keys := map[string]bool{}
	if s.opts.ConfigFile == "" {
		return keys, nil
	}
	settings, err := conf.ParseFile(s.opts.ConfigFile)
	if err != nil {
		return nil, fmt.Errorf("NATS configuration file %s: %w", s.opts.ConfigFile, err)
	}
	for key, value := range settings {
		key = strings.ToLower(key)
		keys[key] = true
		if block, ok := value.(map[string]any); ok && key == "jetstream" {
			for name := range block {
				keys[key+"."+strings.ToLower(name)] = true
			}
		}
	}

	return keys, nil
}

func checkListen(o *server.Options) error {
	if o.Port == server.RANDOM_PORT || o.Port <= 0 {
		return nil
	}
	addr := net.JoinHostPort(o.Host, strconv.Itoa(o.Port))
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("NATS cannot listen on %s: %w (another server may use the address: choose another --nats-listen)", addr, err)
	}

	return l.Close()
}

// URL is where clients connect.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.url
}

// InProcessConn gives a pipe to the running server, also after a restart; the
// server's own would end with the server it came from.
func (s *Server) InProcessConn() (net.Conn, error) {
	s.mu.Lock()
	srv := s.srv
	s.mu.Unlock()
	if srv == nil {
		return nil, errors.New("the embedded nats-server is not running")
	}
	conn, err := srv.InProcessConn()
	if err != nil {
		return nil, fmt.Errorf("connect to the embedded nats-server: %w", err)
	}

	return conn, nil
}

// RequiresTLS reports whether clients outside of the process must use TLS.
func (s *Server) RequiresTLS() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.tls
}

// Stop ends the server and waits until it is gone.
func (s *Server) Stop() {
	s.mending.Lock()
	defer s.mending.Unlock()
	s.stop()
}

func (s *Server) stop() {
	s.mu.Lock()
	srv, stopped, dir := s.srv, s.stopped, s.store
	s.srv = nil
	s.mu.Unlock()
	if srv == nil {
		return
	}
	stopped()
	srv.Shutdown()
	srv.WaitForShutdown()
	if err := dir.close(); err != nil {
		s.opts.Logger.Warn("the directory of a NATS server that keeps nothing is left behind", "err", err)
	}
}

// Restart runs a stopped server again on the port it had.
func (s *Server) Restart() error {
	u, err := url.Parse(s.URL())
	if err != nil {
		return fmt.Errorf("restart NATS at %q: %w", s.URL(), err)
	}

	return s.start(u.Host)
}
