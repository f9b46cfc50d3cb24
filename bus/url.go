package bus

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Server URLs may carry a password, or a token in place of a user: of what people gave only
// what shown returns may stand in an error or a log.

// serverURLs returns each URL of lists that are separated by commas, empty ones left out as
// the client library does. Its error quotes none.
func serverURLs(lists []string) ([]string, error) {
	var urls []string
	for _, list := range lists {
		for raw := range strings.SplitSeq(list, ",") { // flags have split them before
			raw = strings.TrimSpace(raw)
			if len(urls) > 0 && strings.Contains(raw, "@") && !strings.Contains(raw, "://") {
				return nil, errors.New("list of NATS URLs: a user or password contains a comma (write %2C), " +
					"or a URL has no scheme (write nats://user:password@host:4222)")
			}
			if raw != "" {
				urls = append(urls, raw)
			}
		}
	}
	if len(urls) == 0 {
		return nil, errors.New("no NATS URL: want a URL such as nats://host:4222")
	}

	return urls, nil
}

// parseURL takes what the client library takes: nats is the scheme of a URL without one.
// Its error does not quote the URL.
func parseURL(raw string) (*url.URL, error) {
	if !strings.Contains(raw, "://") {
		raw = "nats://" + raw
	}
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" {
		return nil, fmt.Errorf("NATS URL %s: want a URL such as nats://host:4222, with special characters of a password %%-escaped",
			shown(raw))
	}

	return u, nil
}

// shown writes a URL without what identifies its user.
func shown(raw string) string {
	if raw == "" {
		return ""
	}
	scheme, rest, found := strings.Cut(raw, "://")
	if !found {
		scheme, rest = "nats", raw
	}
	stars := ""
	if at := strings.LastIndex(rest, "@"); at >= 0 {
		stars, rest = "***@", rest[at+1:]
	}
	u, err := url.Parse(scheme + "://" + rest)
	if err != nil {
		return "that does not parse" // what looks like a port may be a password's beginning
	}

	return u.Scheme + "://" + stars + u.Host
}

func allShown(lists []string) string {
	urls, err := serverURLs(lists)
	if err != nil {
		return "no URL"
	}
	for i := range urls {
		urls[i] = shown(urls[i])
	}

	return strings.Join(urls, ",")
}
