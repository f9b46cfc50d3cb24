package main

import (
	"bytes"
	"crypto/rand"
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
)

// user is a user of the API server. RBAC defines its rights.
type user struct {
	name   string
	groups []string
	token  string
}

// systemUsers returns the users that always exist: the admin, and the two children under the names in RBAC's built-in
// bindings.
func systemUsers() []user {
	return []user{
		{name: adminUser, groups: []string{"system:masters"}},
		{name: "system:" + controllerManagerName},
		{name: "system:" + schedulerName},
	}
}

const adminUser = "admin"

// userName is strict because the name is also a file name.
var userName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// parseUsers reads values of --users: "name" or "name:group1,group2".
func parseUsers(values []string) ([]user, error) {
	var users []user
	for _, value := range values {
		name, groups, _ := strings.Cut(value, ":")
		if !userName.MatchString(name) {
			return nil, fmt.Errorf("--users %q: %q is not a name of lower-case letters, digits, '-' and '.'; "+
				"write name or name:group1,group2", value, name)
		}
		if name == adminUser || slices.ContainsFunc(users, func(u user) bool { return u.name == name }) {
			return nil, fmt.Errorf("--users %q: there is already a user %q; choose another name", value, name)
		}
		u := user{name: name}
		if groups != "" {
			u.groups = strings.Split(groups, ",")
		}
		if slices.Contains(u.groups, "") {
			return nil, fmt.Errorf("--users %q: a group is empty; write name:group1,group2", value)
		}
		users = append(users, u)
	}
	return users, nil
}

// assignTokens gives each user its token in the token file at path, or a new one if it has none, and rewrites the file
// for exactly these users. So kubeconfigs of a kept cluster stay valid.
func assignTokens(path string, users []user) error {
	tokens, err := readTokens(path)
	if err != nil {
		return err
	}
	var buf bytes.Buffer
	w := csv.NewWriter(&buf)
	for i := range users {
		u := &users[i]
		u.token = tokens[u.name]
		if u.token == "" {
			u.token = rand.Text()
		}
		record := []string{u.token, u.name, u.name} // the last is the uid
		if len(u.groups) > 0 {                      // the API server would read an empty field as a group without a name
			record = append(record, strings.Join(u.groups, ","))
		}
		if err := w.Write(record); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	w.Flush()
	return os.WriteFile(path, buf.Bytes(), 0o600)
}

// readTokens returns tokens by user name; none if there is no file.
func readTokens(path string) (map[string]string, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := csv.NewReader(f)
	r.FieldsPerRecord = -1 // groups are optional
	records, err := r.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w; start without --keep to make a new cluster", path, err)
	}
	tokens := map[string]string{}
	for _, record := range records {
		if len(record) > 1 {
			tokens[record[1]] = record[0]
		}
	}
	return tokens, nil
}
