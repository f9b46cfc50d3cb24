package caller

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"time"
)

// The limit of a stream that is half full is doubled. It starts at leastStreamBytes, which
// JetStream reserves for each provider and which holds some hundred thousand machines a
// day. It ends at mostStreamBytes, which bounds what a misbehaving replica can fill.
const (
	leastStreamBytes = 64 << 20
	mostStreamBytes  = 1 << 30
	// widenAgain is the time between tries to raise the limit.
	widenAgain = 30 * time.Second
)

// A streamInfo is what JetStream reports of a stream.
type streamInfo struct {
	bytes, limit int64                      // a negative limit means none
	hasLeader    bool                       // the stream's servers have a leader
	lagging      int                        // number of servers that are offline or lag
	replicated   bool                       // more than one server holds it
	made, now    time.Time                  // by the server's clock
	last         uint64                     // sequence of the newest record
	config       map[string]json.RawMessage // all settings of the stream
}

// readStream asks JetStream for a stream's info.
func (s *streams) readStream(ctx context.Context, name string) (streamInfo, error) {
	var info struct {
		Created time.Time                  `json:"created"`
		Now     time.Time                  `json:"ts"`
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
		} `json:"cluster"` // absent on a single server
	}
	if err := s.apiRequest(ctx, "STREAM.INFO."+name, nil, &info); err != nil {
		return streamInfo{}, err
	}
	r := streamInfo{bytes: info.State.Bytes, config: info.Config, hasLeader: true, made: info.Created, now: info.Now, last: info.State.Last}
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

// wantedLimit returns the limit that the stream should have. It is never lower than the
// current one, which another manager or a person may have raised.
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

// checkSize raises a stream's limit before it is full, and logs when it is nearly full
// nevertheless.
func (s *streams) checkSize(ctx context.Context, st *stream) {
	if wanted := st.room.wantedLimit(); wanted > st.room.limit && (st.raiseFailedAt.IsZero() || time.Since(st.raiseFailedAt) >= widenAgain) {
		s.raiseLimit(ctx, st, wanted)
	}
	log := s.c.log.With("stream", st.state.Name, "provider", st.state.Provider, "bytes", st.room.bytes, "limit", st.room.limit)
	const high, low = 90, 80 // per cent; between them the state stays
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

// raiseLimit changes only the limit: another manager or a person may have changed other
// settings. If JetStream has no room, the stream works until it is full.
func (s *streams) raiseLimit(ctx context.Context, st *stream, limit int64) {
	log := s.c.log.With("stream", st.state.Name, "provider", st.state.Provider, "bytes", st.room.bytes, "limit", st.room.limit, "new_limit", limit)
	config := maps.Clone(st.room.config)
	config[maxBytesKey] = json.RawMessage(strconv.FormatInt(limit, 10))
	if err := s.apiRequest(ctx, "STREAM.UPDATE."+st.state.Name, config, nil); err != nil {
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
