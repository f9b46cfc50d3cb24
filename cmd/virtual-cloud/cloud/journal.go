package cloud

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// journal is the append-only log. Its caller must lock.
type journal struct {
	out     io.Writer
	entries []cloudapi.LogEntry
}

// append numbers and writes an entry, and keeps it if that succeeds.
func (j *journal) append(e cloudapi.LogEntry) error {
	e.Seq, e.Time = uint64(len(j.entries))+1, time.Now().UTC()
	if j.out != nil {
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("log: %w", err)
		}
		if _, err := j.out.Write(append(line, '\n')); err != nil {
			return fmt.Errorf("write the log (is the disk full?): %w", err)
		}
	}
	j.entries = append(j.entries, e)

	return nil
}

// Log returns the entries with a higher Seq than after.
func (c *Cloud) Log(after uint64) []cloudapi.LogEntry {
	c.mu.Lock()
	defer c.mu.Unlock()
	if after >= uint64(len(c.log.entries)) {
		return nil
	}

	// Entries are never changed, so the part may be read without the lock.
	return c.log.entries[after:len(c.log.entries):len(c.log.entries)]
}
