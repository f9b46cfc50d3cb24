package cloudapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// maxErrorBody bounds how much of an error's body is read.
const maxErrorBody = 64 << 10

// A Client calls one cloud. Its methods are safe for concurrent use, never retry, and end
// when ctx does. They return an [*Error] if the cloud refused the call; after any other
// error the effect of a mutating call is unknown.
type Client struct{ conn }

// An Option changes how a client works.
type Option func(*conn)

// WithHTTPClient makes the client send through c, whose timeout then applies to
// every call. The default is a client without a timeout that all clients share.
func WithHTTPClient(c *http.Client) Option { return func(conn *conn) { conn.http = c } }

// NewClient returns a client of the cloud at endpoint, an http or https URL. apiToken
// may be empty for clouds without tokens.
func NewClient(endpoint, apiToken string, opts ...Option) (*Client, error) {
	c, err := newConn(endpoint, apiToken, opts)
	if err != nil {
		return nil, err
	}

	return &Client{c}, nil
}

// Create creates an instance, or returns the one of the idempotency token.
func (c *Client) Create(ctx context.Context, req CreateRequest) (*Instance, error) {
	return call[Instance](ctx, c.conn, http.MethodPost, "/v1/instances", req)
}

// Get returns an instance by id.
func (c *Client) Get(ctx context.Context, id string) (*Instance, error) {
	return call[Instance](ctx, c.conn, http.MethodGet, "/v1/instances/"+url.PathEscape(id), nil)
}

// List returns the instances that filter chooses, oldest first.
func (c *Client) List(ctx context.Context, filter Filter) ([]Instance, error) {
	query := url.Values{}
	if filter.Name != "" {
		query.Set("name", filter.Name)
	}
	for k, v := range filter.Tags {
		query.Add("tag", k+"="+v)
	}
	path := "/v1/instances"
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	list, err := call[InstanceList](ctx, c.conn, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}

	return list.Instances, nil
}

// Delete deletes an instance, and returns when it is gone. If there is none, it returns
// [CodeNotFound].
func (c *Client) Delete(ctx context.Context, id string) error {
	_, err := call[Instance](ctx, c.conn, http.MethodDelete, "/v1/instances/"+url.PathEscape(id), nil)

	return err
}

// Initialize initializes an instance after its creation. Repeating it changes nothing.
func (c *Client) Initialize(ctx context.Context, id string) (*Instance, error) {
	return call[Instance](ctx, c.conn, http.MethodPost, "/v1/instances/"+url.PathEscape(id)+"/initialize", nil)
}

// conn holds the address and credentials of a cloud.
type conn struct {
	endpoint string
	token    string
	http     *http.Client
}

// shared keeps idle connections for all calls that a driver may have in flight.
var shared = &http.Client{Transport: &http.Transport{
	Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 256, IdleConnTimeout: time.Minute,
}}

func newConn(endpoint, token string, opts []Option) (conn, error) {
	u, err := url.Parse(endpoint)
	// The error does not quote the URL, which may contain a password.
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil {
		return conn{}, errors.New("the virtual cloud's endpoint must be a URL such as http://127.0.0.1:8080, without user and password")
	}
	c := conn{endpoint: strings.TrimRight(u.Scheme+"://"+u.Host+u.EscapedPath(), "/"), token: token, http: shared}
	for _, opt := range opts {
		opt(&c)
	}

	return c, nil
}

// call sends in as JSON unless it is nil, and returns the answer.
func call[Out any](ctx context.Context, c conn, method, path string, in any) (*Out, error) {
	resp, err := c.send(ctx, method, path, in)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out := new(Out)
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return nil, fmt.Errorf("virtual cloud: answer to %s %s: %w", method, path, err)
	}

	return out, nil
}

// send returns a successful answer, whose body the caller must close.
func (c conn) send(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("virtual cloud: %s %s: %w", method, path, err)
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.endpoint+path, body)
	if err != nil {
		return nil, fmt.Errorf("virtual cloud: %w", err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("virtual cloud: %w", err)
	}
	if resp.StatusCode >= http.StatusOK && resp.StatusCode < http.StatusMultipleChoices {
		return resp, nil
	}
	defer resp.Body.Close()

	return nil, errorOf(resp)
}

// errorOf decodes a refusal. One without the cloud's body comes from a proxy.
func errorOf(resp *http.Response) *Error {
	e := &Error{Status: resp.StatusCode}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = time.Duration(seconds) * time.Second
	}
	var body ErrorBody
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err == nil {
		err = json.Unmarshal(data, &body)
	}
	if err != nil || body.Error.Code == "" {
		e.Code, e.Message = "HTTP", http.StatusText(resp.StatusCode)

		return e
	}
	e.Code, e.Message, e.InstanceID = body.Error.Code, body.Error.Message, body.Error.InstanceID
	if body.Error.RetryAfter > 0 { // finer than the header's whole seconds
		e.RetryAfter = time.Duration(body.Error.RetryAfter)
	}

	return e
}
