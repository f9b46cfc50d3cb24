package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/cmd/mcmctl/message"
)

// maxInput exceeds the largest message that a NATS server accepts (64 MiB).
const maxInput = 65 << 20

func newDecode() *cobra.Command {
	var pretty bool
	var subject string
	cmd := &cobra.Command{
		Use:   "decode [file]",
		Short: "Print one message payload as JSON",
		Long: `Read the payload of one message from standard input, or from a file, and print it
as one line of JSON. It works with "nats sub --translate" and
"nats req --translate", which pass a command nothing but the payload.

Payloads of machinebus are Envelope messages in protobuf or JSON. Other JSON, such as
answers of NATS service discovery and of JetStream, is printed unchanged. An empty
payload is the "no responders" message of NATS. Sealed data is not opened; its length
is shown.`,
		Example: `  nats sub 'mcm.v1.>' --translate 'mcmctl decode'
  nats sub 'mcm.v1.*.audit.>' --translate 'mcmctl decode --pretty'
  mcmctl decode payload.bin --pretty`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			data, err := readInput(cmd.InOrStdin(), args)
			if err != nil {
				return err
			}

			return decode(cmd.OutOrStdout(), data, subject, pretty)
		},
	}
	cmd.Flags().BoolVar(&pretty, "pretty", false, "print on several lines")
	cmd.Flags().StringVar(&subject, "subject", "", "`subject` of the message; its parts are printed, too")
	mustComplete(cmd, "subject", cobra.NoFileCompletions)

	return cmd
}

func readInput(in io.Reader, args []string) ([]byte, error) {
	if len(args) > 0 && args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return nil, fmt.Errorf("payload: %w", err)
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	if err != nil {
		return nil, fmt.Errorf("read payload: %w", err)
	}
	if len(data) > maxInput {
		return nil, fmt.Errorf("payload exceeds %d bytes, more than a NATS message can have: pass one message at a time", maxInput)
	}

	return data, nil
}

// decode writes a payload as JSON, with the parts of its subject unless that is empty.
func decode(w io.Writer, payload []byte, subject string, pretty bool) error {
	m, err := message.Parse(payload)
	if err != nil {
		return err
	}
	text, err := m.JSON()
	if err != nil {
		return err
	}
	var v any = text
	if subject != "" {
		row := message.NewRow(subject)
		row.Message = text
		v = row
	}

	return message.WriteJSON(w, v, !pretty)
}
