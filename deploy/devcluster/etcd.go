package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func etcdMain() int {
	etcdmain.Main(os.Args)
	return 0
}

// etcdServer is the embedded etcd, plain HTTP on a loopback port.
type etcdServer struct {
	*embed.Etcd
	url string
}

// startEtcd starts etcd over dataDir on a port, or on a free one if that is 0, and returns when it serves. It calls
// onFatal on a fatal error, after which etcd ends the process.
func startEtcd(ctx context.Context, dataDir string, port int, logPath string, onFatal func(error)) (*etcdServer, error) {
	logger, err := etcdLogger(logPath, onFatal)
	if err != nil {
		return nil, err
	}
	// embed opens its ports itself, so another process may take a free port before that.
	const attempts = 5
	for attempt := 1; ; attempt++ {
		etcd, err := startEtcdOnce(ctx, dataDir, port, logger)
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) {
			return etcd, err
		}
		if attempt == attempts {
			if port != 0 {
				return nil, fmt.Errorf("port %d of %s is taken; choose another --etcd-port, or 0 for a free one", port, loopback)
			}
			return nil, err
		}
	}
}

func startEtcdOnce(ctx context.Context, dataDir string, port int, logger *zap.Logger) (*etcdServer, error) {
	urls, err := freeURLs(2)
	if err != nil {
		return nil, err
	}
	client, peer := urls[:1], urls[1:]
	if port != 0 {
		client[0].Host = net.JoinHostPort(loopback, strconv.Itoa(port))
	}

	cfg := embed.NewConfig()
	cfg.Name = "devcluster"
	cfg.Dir = dataDir
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = client, client
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = peer, peer
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.UnsafeNoFsync = true // data survive a killed process, but not a crashed machine
	cfg.LogLevel = "error"
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger)

	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, fmt.Errorf("start etcd over %s: %w", dataDir, err)
	}
	select {
	case <-server.Server.ReadyNotify():
		return &etcdServer{Etcd: server, url: client[0].String()}, nil
	case err = <-server.Err():
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	server.Close()
	return nil, fmt.Errorf("wait for etcd: %w", err)
}

// stop closes etcd, and gives up waiting after the limit.
func (e *etcdServer) stop(limit time.Duration) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.Close()
	}()
	select {
	case <-done:
		return nil
	case <-time.After(limit):
		return fmt.Errorf("etcd did not stop within %s", limit)
	}
}

func etcdLogger(path string, onFatal func(error)) (*zap.Logger, error) {
	cfg := zap.NewProductionConfig()
	cfg.Level = zap.NewAtomicLevelAt(zap.ErrorLevel)
	cfg.DisableStacktrace = true
	cfg.OutputPaths = []string{path}
	cfg.ErrorOutputPaths = []string{path}
	logger, err := cfg.Build(zap.WithFatalHook(fatalHook(onFatal)))
	if err != nil {
		return nil, fmt.Errorf("open etcd's log: %w", err)
	}
	return logger, nil
}

// fatalHook reports the reason before etcd's logger ends the process, for example a full disk.
type fatalHook func(error)

// OnWrite implements zapcore.CheckWriteHook.
func (h fatalHook) OnWrite(entry *zapcore.CheckedEntry, fields []zapcore.Field) {
	err := errors.New(entry.Message)
	for _, f := range fields {
		if cause, ok := f.Interface.(error); ok {
			err = fmt.Errorf("%s: %w", entry.Message, cause)
		}
	}
	h(err)
	os.Exit(1)
}

// freeURLs returns URLs on n different free loopback ports.
func freeURLs(n int) ([]url.URL, error) {
	var urls []url.URL
	for range n {
		l, err := net.Listen("tcp", loopback+":0")
		if err != nil {
			return nil, fmt.Errorf("find a free port on %s: %w", loopback, err)
		}
		defer l.Close() //nolint:gocritic // kept open until all are found: they must differ
		urls = append(urls, url.URL{Scheme: "http", Host: l.Addr().String()})
	}
	return urls, nil
}
