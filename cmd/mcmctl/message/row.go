package message

import (
	"encoding/json"

	"github.com/machinebus/machinebus/bus"
)

// A Row is a message with its subject, time and reply subject, in JSON.
type Row struct {
	Time string `json:"time,omitempty"`
	subjectRow

	Reply   string          `json:"reply,omitempty"`
	Message json.RawMessage `json:"message,omitempty"`
	Error   string          `json:"error,omitempty"`
}

// subjectRow is a subject and its parts, which a subject of others does not have.
type subjectRow struct {
	Subject   string `json:"subject"`
	Cluster   string `json:"cluster,omitempty"`
	Tree      string `json:"tree,omitempty"`
	Provider  string `json:"provider,omitempty"`
	Replica   string `json:"replica,omitempty"`
	Verb      string `json:"verb,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// NewRow returns a Row with a subject and, if it is one of machinebus, its parts.
func NewRow(subject string) Row {
	row := Row{subjectRow: subjectRow{Subject: subject}}
	s, err := bus.ParseSubject(subject)
	if err != nil {
		return row
	}
	row.Cluster, row.Tree, row.Provider, row.Replica = s.Cluster, string(s.Tree), s.Provider, s.Replica
	row.Verb, row.Namespace, row.Name = s.Verb, s.Namespace, s.Name

	return row
}
