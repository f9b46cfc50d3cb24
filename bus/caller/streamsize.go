package caller

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// A stream that is half full is allowed twice as much: from leastStreamBytes, which is
// for some hundred thousand machines a day and what JetStream reserves for each
// provider, up to mostStreamBytes, which is what a replica that misbehaves can fill.
const (
	leastStreamBytes = 64 << 20
	mostStreamBytes  = 1 << 30
	// widenAgain is the time between tries where JetStream had no more room.
	widenAgain = 30 * time.Second
)

// A room is how much a stream holds, and may hold, in bytes.
type streamInfo struct {
	bytes, limit int64                      // no limit is negative
	hasLeader    bool                       // a server leads those that hold it
	lagging      int                        // servers that are offline or lag
	replicated   bool                       // more than one server holds it
	made         time.Time                  // by the server's clock
	last         uint64                     // sequence of the newest record
	config       map[string]json.RawMessage // of the stream, all of it
}

// readStream asks JetStream for a stream's.
func (s *streams) readStream(ctx context.Context, name string) (streamInfo, error) {
	var info struct {
		Created time.Time                  `json:"created"`
		Config  map[string]json.RawMessage `json:"config"`
		State   struct {
			Bytes int64  `json:"bytes"`
			Last  uint64 `json:"last_seq"`
		} `json:"state"`
		Cluster *struct {
			Leader   string `json:"leader"`
			Replicas []struct {
				Current bool `json:"current"`
				Offline bool `json:"offline"`
			} `json:"replicas"`
		} `json:"cluster"` // of a server of its own nothing is told
	}
	if err := s.apiRequestInto(ctx, "STREAM.INFO."+name, nil, &info); err != nil {
		return streamInfo{}, err
	}
	r := streamInfo{bytes: info.State.Bytes, config: info.Config, hasLeader: true, made: info.Created, last: info.State.Last}
	if info.Cluster != nil {
		r.hasLeader, r.replicated = info.Cluster.Leader != "", len(info.Cluster.Replicas) > 0
		for _, replica := range info.Cluster.Replicas {
			if replica.Offline || !replica.Current {
				r.lagging++
			}
		}
	}
	if limit, ok := info.Config[maxBytesKey]; ok {
		if err := json.Unmarshal(limit, &r.limit); err != nil {
			return streamInfo{}, fmt.Errorf("STREAM.INFO.%s: %s: %w", name, maxBytesKey, err)
		}
	}

	return r, nil
}

const maxBytesKey = "max_bytes"

// wantedLimit is how much the stream should be allowed to hold. It is never less than
// before: other managers may have seen more in it, or people know better.
func (r streamInfo) wantedLimit() int64 {
	if r.limit <= 0 {
		return r.limit
	}
	most := max(r.limit, leastStreamBytes)
	for r.bytes > most/2 && most < mostStreamBytes {
		most = min(2*most, mostStreamBytes)
	}

	return most
}

// checkSize has a stream hold more before it is full, and tells people when it is nearly
// full all the same.
func (s *streams) checkSize(ctx context.Context, st *stream) {
	if wanted := st.room.wantedLimit(); wanted > st.room.limit && (st.raiseFailedAt.IsZero() || time.Since(st.raiseFailedAt) >= widenAgain) {
		s.raiseLimit(ctx, st, wanted)
	}
	log := s.c.log.With("stream", st.state.Name, "provider", st.state.Provider, "bytes", st.room.bytes, "limit", st.room.limit)
	const high, low = 90, 80 // per cent; between them it is as it was
	switch percent := st.room.percent(); {
	case percent >= high && !st.nearlyFull:
		st.nearlyFull = true
		log.Error("the operations stream is nearly full. Once it is, it takes no claims and outcomes: creates and " +
			"deletes wait until its records are a day old. Look for a driver with large last known states or a replica that floods the stream " +
			"(mcmctl ops), and raise the limit (nats stream edit --max-bytes; mcm keeps a higher limit)")
	case percent < low:
		st.nearlyFull = false
	}
}

func (r streamInfo) percent() int64 {
	if r.limit <= 0 {
		return 0
	}

	return r.bytes * 100 / r.limit
}

// raiseLimit changes nothing but the limit: another manager, or people, may have changed
// the rest. Where JetStream has no room it is as good as before, until it is full.
func (s *streams) raiseLimit(ctx context.Context, st *stream, limit int64) {
	log := s.c.log.With("stream", st.state.Name, "provider", st.state.Provider, "bytes", st.room.bytes, "limit", st.room.limit, "new_limit", limit)
	config := map[string]any{}
	for key, value := range st.room.config {
		config[key] = value
	}
	config[maxBytesKey] = limit
	if err := s.apiRequest(ctx, "STREAM.UPDATE."+st.state.Name, config); err != nil {
		if st.raiseFailedAt.IsZero() {
			log.Warn("the operations stream fills up and mcm cannot raise its limit: give JetStream more room (max_file_store or the account's limits), "+
				"and let mcm's user publish to $JS.API.STREAM.UPDATE", "err", err)
		}
		st.raiseFailedAt = time.Now()

		return
	}
	log.Info("the operations stream fills up; its limit was raised")
	st.raiseFailedAt, st.room.limit = time.Time{}, limit
	s.mu.Lock()
	defer s.mu.Unlock()
	st.state.MaxBytes = limit
}
